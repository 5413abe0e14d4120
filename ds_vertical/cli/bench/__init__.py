"""Commands that measure: `ab`, `limits`, and what they share."""
