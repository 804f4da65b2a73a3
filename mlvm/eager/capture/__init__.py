"""A function of tensors, recorded once and replayed as one program."""
