"""Only here so that `functional` below it can be imported."""
