"""The machine: types, programs, the free store, the function table, ops and the VM.

It knows no gradients and no eager tensors.
"""
