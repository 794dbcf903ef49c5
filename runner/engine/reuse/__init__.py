"""What a session holds, used again: at other positions, or compressed."""
