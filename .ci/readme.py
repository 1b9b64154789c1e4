"""Runs the README's code blocks as they stand there: `readme.py command N` or `readme.py blocks`.

A ```sh block runs in bash, a ```python block in the environment that the first command made. A block
whose fence says ```text is not code. The first two sh blocks are the two commands, one line each.
`blocks` also runs the ```python blocks of docs/, in a folder that is thrown away.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path = ROOT / "README.md") -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def run(language: str, code: str, folder: Path = ROOT) -> None:
    print(f"--- {language}\n{code}", flush=True)
    env = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [ROOT / ".venv/bin/python", "-c", code]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, timeout=3000)
    if done.returncode:
        sys.exit(f"a code block failed with {done.returncode}:\n{code}")


def main() -> None:
    shell = [code for language, code in blocks() if language == "sh"]
    if sys.argv[1] == "command":
        code = shell[int(sys.argv[2]) - 1]
        if len(code.strip().splitlines()) != 1:
            sys.exit("the README's first two sh blocks must be one line each")
        run("sh", code)
        return
    for language, code in blocks():
        if language in ("sh", "python") and code not in shell[:2]:
            run(language, code)
    for page in sorted((ROOT / "docs").glob("*.md")):
        for language, code in blocks(page):
            if language == "python":
                with tempfile.TemporaryDirectory() as folder:
                    run(language, code, Path(folder))


if __name__ == "__main__":
    main()
