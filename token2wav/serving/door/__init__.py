"""Door of a server: finds the utterance of each message, and checks what the message asks for."""
