"""Imported by transformers' video code; nothing in it is used."""
