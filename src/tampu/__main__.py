"""Entry point of `python -m tampu`, which is the same as `tampu`."""

from tampu.cli.__main__ import leave_current_folder, main

if __name__ == "__main__":
    leave_current_folder()
    main()
