"""Interoperability with other libraries."""
