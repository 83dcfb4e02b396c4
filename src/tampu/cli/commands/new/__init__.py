"""`tampu new`: writes a small working project from `templates/`.

`templates/common` and one of `plain`, `fastapi` and `django` make a project named `sample-project`, with the package
`sample_project`. Nothing is templated but these two names, so the files can be read, linted and run as they are.
"""
