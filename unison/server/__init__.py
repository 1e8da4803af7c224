"""An engine behind HTTP: a front end that speaks to clients, and the engine process it looks after."""
