#!/bin/sh
# Prints the path of a Python 3.11 or newer found on PATH, or says how to install one.
for python in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "tampu needs Python 3.11 or newer; none was found on PATH (python3 is $(python3 --version 2>/dev/null || echo missing))." >&2
echo "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python) and run make again." >&2
exit 1
