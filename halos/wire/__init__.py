"""The room that translates: messages to bytes and back, and who may send them to whom."""
