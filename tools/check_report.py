"""Open a report in a headless Chromium: fail on anything its console says and on figures that were not drawn.

    python tools/check_report.py runs/NAME/report.html [--figures 4]

Exit code 0: all is well. 1: it is not. 2: no report or no browser.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def inspect(report: Path, browser: str, timeout: float = 120.0) -> tuple[int, list[str], str]:
    """Load ``report`` without network; the number of figures drawn, what the console said, and the page as it then was."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--no-sandbox",  # as root, in containers; the page is our own
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--virtual-time-budget=10000",
            "--dump-dom",
            report.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    # Chromium logs every console message at one level. The page says nothing of its own, so each is a fault.
    messages = re.findall(r":CONSOLE[:(]\d+[\])]+ (.*)", done.stderr)
    # plotly marks a container once it has drawn into it; the page marks the document once all have been.
    drawn = len(re.findall(r'class="plot js-plotly-plot"', done.stdout)) if "data-drawn=" in done.stdout else 0
    return drawn, messages, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--figures", type=int, default=4, help="figures that must be drawn")
    arguments = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(f"no browser: looked for {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    if not arguments.report.is_file():
        print(f"{arguments.report} is not a file", file=sys.stderr)
        return 2
    drawn, messages, _ = inspect(arguments.report, browser)
    print(f"{drawn} of {arguments.figures} figures drawn, {len(messages)} console messages")
    for message in messages:
        print(f"  {message}")
    return int(drawn != arguments.figures or bool(messages))


if __name__ == "__main__":
    sys.exit(main())
