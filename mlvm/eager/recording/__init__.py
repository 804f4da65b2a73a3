"""Launches recorded instead of run, and launches watched for errors."""
