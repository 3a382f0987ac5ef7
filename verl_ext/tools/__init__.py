"""The commands `report` and `compare`, which read what runs have written, `show` and `recipes`.

Nothing else imports them.
"""
