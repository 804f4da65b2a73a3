"""What can be seen: reports, pictures, traces, and `python -m mlvm memory` and `show`."""
