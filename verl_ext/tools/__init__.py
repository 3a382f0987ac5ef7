"""Commands that read what runs have written: `report`, `compare`, and `show`. Nothing else imports them."""
