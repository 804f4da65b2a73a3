"""Views of a program: reports, pictures, profiles, and `python -m mlvm memory` and `show`."""
