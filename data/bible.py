"""The King James Bible as plain text, printed by the command `bible` (Debian package bible-kjv)."""
import re
import shutil
import subprocess

BIBLE_RANGE = "gen1:1-rev99:99"


def bible_text():
    """Chapters as paragraphs, without verse numbers."""
    command = shutil.which("bible")
    if command is None:
        raise ValueError("no command `bible` (Debian package bible-kjv); run data/make_dumps.sh or give --text FILE")
    done = subprocess.run([command, "-f", BIBLE_RANGE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    chapters, last = [], None
    for line in done.stdout.splitlines():
        verse = re.fullmatch(r"(\S.*?\d+):\d+ (.*)", line)
        if verse is None:
            raise ValueError(f"`bible` printed a line that is no verse: {line[:60]!r}")
        if verse[1] != last:
            chapters.append([])
            last = verse[1]
        chapters[-1].append(verse[2].strip())
    return "\n\n".join(" ".join(c) for c in chapters) + "\n"
