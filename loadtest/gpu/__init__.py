"""Measurements on a real GPU: what the bars ask for, each part runnable by itself and within a time limit."""
