"""How arrays are divided over devices: logical axes, partition specs, placements, and plans as compiled programs."""
