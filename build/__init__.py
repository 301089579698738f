"""On the host: build, lock, push, pull, save, load and verify the image."""
