"""What a session is and how it is kept: ids, formats, state machines. Imports no other midstream package."""
