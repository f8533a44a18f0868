"""Measurements on a real GPU: what the bars ask for, each part by itself and within a time limit."""
