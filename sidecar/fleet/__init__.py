"""Who is in a fleet, who owns a session there, and until when a member may send tokens."""
