"""The envelope: DataProto and its helpers."""
