"""What `kvrelay doctor` looks at. Whoever judges facts is a function of them; whoever finds them is short."""
