"""Interoperation with other libraries."""
