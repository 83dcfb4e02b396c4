"""`python -m tampu`: the same as `tampu`."""

from tampu.cli.__main__ import main

if __name__ == "__main__":
    main()
