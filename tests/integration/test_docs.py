"""What the pages for admins quote must be what the programs say."""
import re

import lab


def test_the_trouble_table_quotes_real_messages():
    page = (lab.TOP / "docs/REMOTE_VISION.md").read_text()
    table = page[page.index("| message | cause |"):]
    quotes = [q for row in table.splitlines()[2:] for q in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quotes) > 15
    # C joins string literals that follow each other
    sources = "\n".join(re.sub(r'"\s*\n\s*"', "", f.read_text())
                        for part in ("server", "remote", "common") for f in (lab.TOP / part).rglob("*.c"))
    missing = [q for q in quotes if q not in sources]
    assert not missing
