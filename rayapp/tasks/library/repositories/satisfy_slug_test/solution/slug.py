import re
import unicodedata


def slugify(title, longest=60):
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    if not words:
        return "untitled"
    slug = words[0][:longest]
    for word in words[1:]:
        if len(slug) + 1 + len(word) > longest:
            break
        slug += f"-{word}"
    return slug
