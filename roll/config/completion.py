"""Keys for the completion of a shell: after the configuration, ``key=`` of every pipeline."""

from __future__ import annotations

from roll.config.pipelines import definitions
from roll.config.reading.schema import flat_options, schema_paths

# Function of the words that may come next.
BASH = """_roll_keys() {{
  compgen -W "{keys}" -- "$1"
}}"""
BASH_END = """
# A value follows a key at once.
_roll_without_space() {
  _shtab_roll
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  return 0
}
complete -o bashdefault -F _roll_without_space roll
"""
ZSH = """_roll_keys() {{
  compadd -S '' -- {keys}
}}"""


def key_paths() -> list[str]:
    """Full paths of the keys of all pipelines, but those below a name that the file chooses."""
    classes: list[type] = [one.config_class for one in definitions()]
    found = {path for cls in classes for paths in schema_paths(cls).values() for path in paths}
    # Of the options of a loss those inside its section; the flat names would be offered twice.
    for cls in classes:
        for name, flat in flat_options(cls).items():
            found = found - {name} | {f"{flat.choice.name}.name", f"{flat.choice.name}.{flat.option.name}"}
    return sorted(path for path in found if "<name>" not in path)


def key_completion() -> dict[str, object]:
    """The keys as shtab takes them for an argument."""
    keys = " ".join(f"{path}=" for path in key_paths())
    preamble = {"bash": BASH.format(keys=keys), "zsh": ZSH.format(keys=keys)}
    return {"preamble": preamble, "bash": "_roll_keys", "zsh": "_roll_keys", "tcsh": ""}
