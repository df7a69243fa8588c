"""From a plan to what people and scripts read; each report is a pure function to text or plain data."""
