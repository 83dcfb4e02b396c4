"""Two releases in one fleet: the previous one, built from its commit, beside this one."""
