"""The ZeRO-3 optimizer of the engine: its chunks along layers, its steps, its state."""
