#!/bin/sh
# `docker run IMAGE train ...` is `loopscale train ...`; a program is run as it is: python, torchrun, bash.
# Nothing rests on this file: pyxis and `apptainer exec` start python or loopscale without it.
set -eu

# A home that cannot be written (a read-only root, a uid without one): caches go to a folder of this user's own.
if [ ! -w "${HOME:-/}" ] && home=$(mktemp -d "${TMPDIR:-/tmp}/home.XXXXXX"); then
    export HOME="$home"
fi

case ${1-} in
    '' | -* | corpus | train | plan | eval | generate | report | convert | launch | doctor) set -- loopscale "$@" ;;
    *) command -v "$1" >/dev/null || set -- loopscale "$@" ;; # a word that it does not know, and says so
esac

# exec: the program is this process, and gets the signals that ask it to save.
exec "$@"
