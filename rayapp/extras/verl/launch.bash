# Runs a verl launch script in a sandbox (script.py). The programs that start trainings are stubs: each call becomes a
# line on standard output, its words in base64. Paths of this machine are below $box.
# Standard input: the script. Arguments: its absolute path, and the absolute working folder.
box=/tmp/box bin=/tmp/bin script=/tmp/box$1
mkdir -p "$bin" "${script%/*}" "$box$2" "$box$HOME"
cat > "$script"
for program in awk base64 basename bash cat cp cut date dirname echo env expr false grep head ln ls mkdir mktemp mv nohup \
    printf pwd readlink realpath rm sed seq sh sort tail tee test touch tr true uname uniq wc which xargs; do
    ln -s "/usr/bin/$program" "$bin/$program"
done
cat > "$bin/stub" <<'STUB'
#!/usr/bin/bash
printf '%s\0' "${0##*/}" "$@" | /usr/bin/base64 -w0 >&9; echo >&9
[ "$1" != -c ] || { printf '\356\200\200%s\356\200\201' "${0##*/}"; exit 1; }
STUB
chmod +x "$bin/stub"
for program in python python3 torchrun ray accelerate; do ln -s stub "$bin/$program"; done
cat > "$bin/functions" <<'FUNCTIONS'
# Other programs don't run. They count as successful; a value made of their output is marked.
command_not_found_handle() {
    printf '%s\0' "$@" | /usr/bin/base64 -w0 >&9; echo >&9
    case $1 in *-smi) return 127;; esac
    local words="$*"  # a blank would split the marked word
    printf '\356\200\200%s\356\200\201' "${words// /$'\302\240'}"
}
# Folders of this machine are read-only here.
mkdir() { command mkdir "$@" 2>/dev/null || true; }
FUNCTIONS
cd "$box$2" || exit
# The pipe stays open until also programs in the background have ended.
{
    HOME=$box$HOME PATH=$bin BASH_ENV=$bin/functions /usr/bin/bash "$script" 9>&1 >/dev/null 2>/tmp/errors </dev/null
    echo "exit $?"
} | cat
tail -n 5 /tmp/errors | tail -c 400 >&2
