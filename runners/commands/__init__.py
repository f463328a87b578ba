"""The command line, one thin function for each command. What is heavy is imported where it is used."""
