# For each C file given, what cc.sh must know: "pr_fmt" if it has its own message prefix, "plain" if a precompiled header must
# not be used, because before its last #include it defines or undefines a macro that some header asks about.
# The names asked about are read from the file that the variable `names` names. Prints "FILE VERDICT" or nothing.
BEGIN { while ((getline name < names) > 0) asked[name] = 1 }
FNR == 1 { finish(); file = FILENAME; pending = ""; plain = 0; format = 0 }
/^[ \t]*#[ \t]*(define|undef)[ \t]/ {
    name = $0
    sub(/^[ \t]*#[ \t]*(define|undef)[ \t]+/, "", name)
    sub(/[^A-Za-z0-9_].*/, "", name)
    if (name == "pr_fmt") format = 1
    else if (name in asked) pending = 1
}
/^[ \t]*#[ \t]*include/ && pending { plain = 1 }
END { finish() }

function finish() {
    if (plain) print file, "plain"
    else if (format) print file, "pr_fmt"
}
