"""What every package of Headroom shares. Nothing here is public."""
