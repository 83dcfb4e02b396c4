"""Find wording that is hard to understand: `make words`.

python scripts/wordcheck.py               # check the project; exit 1 if an enforced file has a match
python scripts/wordcheck.py --all         # also list the matches in files that are only counted
python scripts/wordcheck.py FILE...       # check these files

The patterns are odd phrases that once were in the text, each with what to write instead. They are narrow on purpose: a
match is meant to be rewritten. A line that must quote one ends with `wordcheck: ok`.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

#: Files and folders in which a match is an error.
ENFORCED = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "mkdocs.yml"),
    *("docs", "examples", "src", ".github"),
)
#: Files and folders in which matches are only counted. Move them to ENFORCED once they are clean.
COUNTED: tuple[str, ...] = ()
SUFFIXES = {".md", ".py", ".pyi", ".lua", ".yml", ""}
ESCAPE = "wordcheck: ok"

#: A pattern (ignoring case) and what to do about a match.
PATTERNS: dict[str, str] = {
    r"\bwhoever\b": "name the process or the person",
    r"\b(?:nobody|somebody)\b": "name the process or the person",
    r"\bby (?:him|her)self\b": "'automatically', or name the process",
    r"(?:#:|\"\"\"|\|) who (?:is|holds|leads|has)\b": "say what the value is: 'Metrics sink.', 'Lock holder.'",
    r"\bso many\b(?! (?:that|as))": "name the number: 'at most N', 'the limit'",
    r"\bso (?:long|far apart)\b(?! (?:as|that))": "name the duration",
    r"\bat most so\b|\bevery so often\b": "name the number or the interval",
    r"(?<=\S )(?<!there )\b(?:is|are|was) no (?!longer|more|less|way|differ|slow|fast|better)[a-z]+": "'is not a ...'",
    r"\b(?:that|which) is (?-i:none)\b": "'is not a ...'",
    r"\bof (?:its|their|his|her|our|your|my) own\b": "'its own', 'separate' or 'dedicated'",
    r"\b(?:a|an|any) [\w-]+ of (?:yours|ours|theirs|mine)\b": "'your own ...'",
    r"(?<!is )(?<!still )(?<!stays )(?<!not )\bours\b": "'tampu's'",
    r"\b(?:is|are|was|were|be|been) told\b": "'logged', 'reported', 'notified', 'printed'",
    r"\btells? (?:what|whether|how|when|why|where|it|who)\b": "'shows', 'returns', 'logs', 'reports'",
    r"\bgo(?:es)? on\b|\bwent on\b": "'continues' or 'resumes'",
    r"\bin trouble\b": "'failed; retrying in N s'",
    r"\bno more(?=[.,;:)\"]|$)": "'no longer', 'stops'",
    r"\"\"\"the same\b": "say what it does: 'Add a job that ...'",
    r"\"\"\"(?:what|whether|who|where|how) ": "start with a verb: 'Return ...', 'Add ...'",
    r"\bsynchronous face\b|\bits face\b": "'synchronous API'",
    r"\bin brackets how\b|\bhow often ours\b": "'In parentheses: ...'",
    r"\bwhere to (?:read on|go from here)\b": "'Next steps'",
    r"\bbeside (?:others|it|theirs|the|each|another)\b": "'next to'",
    r"\ball is well\b|\bis all well\b": "say what was checked and found",
    r"\banew\b": "'again'",
    r"\blately\b": "name the period",
    r"\bby chance\b": "'random', 'at random'",
    r"\b(?:can|could|cannot) (?:not )?be had\b": "'is available'",
    r"\bis no end\b|\bare no end\b": "'does not end'",
    r"\b(?:is|are|was|were) looked (?:at|for|into|whether)\b|\bit is looked\b": "active voice: 'checks', 'reads'",
    r"\bby turns\b": "'alternating', 'taking turns'",
    r"(?:#:|help=\") ?most (?:entries|jobs|specs|outcomes|ids)\b": "'Maximum number of ...'",
    r"\b(?:runs|fires|attempts) in all\b": "'in total'",
    r"\bas often as it may\b": "'has used up its attempts'",
    r"\bwhat (?:waits|travelled|it holds|it had fetched)\b|\bfinish\w* what\b": "name it: 'the waiting jobs'",
    r"\bmend (?:the|a|it)\b": "'fix'",
    r"\bsay --": "'pass --...'",
    r"\b(?:stood|stands) still\b": "'was suspended'",
    r"\bma(?:d|k)es? up for\b|\bmade up for\b": "'fires late', 'catches up on'",
    r"\bexcludes? each other\b": "'cannot be combined'",
    r"\bgo(?:es)? with (?:a|an|one|repeat)\b": "'needs', 'can only be used with'",
    r"\badded all the same\b": "'added anyway'",
    r"\bbring(?:s)? (?:its|their) own\b": "'provides'",
    r"\b(?:was|were) not looked into\b|\blook at the\b": "'check', 'examine'",
    r"\b(?:blazing|seamless|effortless|world-class|supercharge)\w*": "no marketing words: give a number",
}
#: Tables that scripts/make_reference.py generates: their text is checked where it is written.
_GENERATED = re.compile(r"<!-- (/)?table")
_COMPILED = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in PATTERNS.items()]


@dataclass(frozen=True)
class Match:
    """An odd phrase and where it is."""

    path: Path
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.text!r}: {self.advice}"


def matches(path: Path) -> list[Match]:
    """Return the matches in one file."""
    found = []
    for number, line in prose(path):
        if ESCAPE not in line:
            for pattern, advice in _COMPILED:
                found += [Match(path, number, match[0], advice) for match in pattern.finditer(line)]
    return found


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that people read, with their numbers: all of a page, comments and strings of a program."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for offset, line in enumerate(token.string.splitlines()):
                    yield token.start[0] + offset, line
        return
    is_generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md" and (mark := _GENERATED.match(line)):
            is_generated = not mark[1]
        if path.suffix == ".lua":
            line = line.partition("--")[2]
        if not is_generated:
            yield number, line


def files(names: tuple[str, ...], root: Path = ROOT) -> list[Path]:
    """Return the text files among these files and folders."""
    found: list[Path] = []
    for name in names:
        path = root / name
        found += sorted(path.rglob("*")) if path.is_dir() else [path]
    return [path for path in found if path.is_file() and path.suffix in SUFFIXES]


def main(arguments: list[str]) -> int:
    if paths := [Path(argument) for argument in arguments if not argument.startswith("-")]:
        found = [match for path in paths for match in matches(path)]
        print("\n".join(map(str, found)) or "wordcheck: no match")
        return int(bool(found))
    counted = files(COUNTED)
    odd = [match for path in files(ENFORCED) if path not in counted for match in matches(path)]
    for match in odd:
        print(match)
    for name in COUNTED:
        known = [match for path in files((name,)) for match in matches(path)]
        if "--all" in arguments:
            print("\n".join(map(str, known)))
        print(f"wordcheck: {len(known)} in {name} (counted, not enforced)")
    print(f"wordcheck: {len(odd)} in {', '.join(ENFORCED)}")
    return int(bool(odd))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
