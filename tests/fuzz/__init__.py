"""Fuzzing: every function that reads bytes or text from elsewhere, with inputs that no writer ever wrote.

| file          | what it does                                                                                    |
|---------------|-------------------------------------------------------------------------------------------------|
| `targets.py`  | the functions, and the errors each of them documents                                            |
| `mutate.py`   | makes new inputs out of old ones                                                                |
| `fuzzer.py`   | looks for inputs that reach new lines, or raise what is not documented                          |
| `corpus/`     | the inputs that are kept: one file per target, one hexadecimal input per line                   |
| `__main__.py` | `make fuzz`                                                                                     |
"""
