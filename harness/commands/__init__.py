"""The commands of the front door, a file each, and the tables that they print."""
