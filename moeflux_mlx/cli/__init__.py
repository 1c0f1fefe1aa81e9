"""What the commands share: options, running one, and the terminal."""
