"""How a node, or one of its workers, is emptied: sessions end or go on elsewhere, and it is said how far that is."""
