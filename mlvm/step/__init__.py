"""A recorded step becomes one planned program."""
