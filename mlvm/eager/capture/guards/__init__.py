"""Guards on the state that a traced function read, which a call checks before a replay."""
