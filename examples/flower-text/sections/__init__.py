"""Which section of an archive does a package belong to, by one line of text?"""
