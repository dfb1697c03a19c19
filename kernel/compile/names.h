/*
 * Included right after the precompiled header: the names that kbuild gives to the file being compiled (cc.sh passes them as FILE_*).
 */
#undef KBUILD_MODNAME
#undef KBUILD_BASENAME
#undef KBUILD_MODFILE
#define KBUILD_MODNAME FILE_KBUILD_MODNAME
#define KBUILD_BASENAME FILE_KBUILD_BASENAME
#define KBUILD_MODFILE FILE_KBUILD_MODFILE
#define __KBUILD_MODNAME FILE___KBUILD_MODNAME
#ifdef FILE_HAS_PR_FMT
#undef pr_fmt
#endif
