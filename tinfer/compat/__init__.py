"""Torch references (the contracts), the import guard, adapters to optional libraries."""
