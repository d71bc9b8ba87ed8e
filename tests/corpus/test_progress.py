from __future__ import annotations

import io

from loopscale.corpus.progress import Bar, Lines, progress_to


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_progress_is_plain_lines() -> None:
    out = io.StringIO()
    progress = progress_to(out)
    assert isinstance(progress, Lines)
    for done in (0, 1_000_000, 2_000_000):
        progress.update("reading", done, 2_000_000)
    progress.note("a warning")
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "reading: 0.0 of 2.0 MB (0%)"
    assert lines[1].startswith("reading: 2.0 of 2.0 MB (100%), ") and lines[1].endswith(" MB/s")
    assert lines[2:] == ["a warning"] and "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    progress = progress_to(out)
    assert isinstance(progress, Bar)
    progress.update("reading", 0, None)
    progress.update("reading", 500, 1000)
    progress.note("left out [3] lines")
    progress.close()
    assert "reading" in out.getvalue() and "left out [3] lines" in out.getvalue()
