"""Plugin of pytest that runs the tests of the Python Array API standard, in a checkout, on mlvm.

`ARRAY_API_TESTS_MODULE=numpy` runs them on another module. The figures in the documents are from
the tag 2026.02.26 of array-api-tests.
"""

from __future__ import annotations

import os

os.environ.setdefault("ARRAY_API_TESTS_MODULE", "mlvm.eager")
os.environ.setdefault("ARRAY_API_TESTS_VERSION", "2025.12")
