/* A word that bash lacks: __warren_w returns the signal that ended the last program that the shell waited
 * for, 0 if that exited, and forgets it. $? cannot tell: 137 may be either.
 *
 * Bash loads this as a builtin (`enable -f`). It needs nothing but bash: no C library, so that it does
 * not matter which one bash is linked with. Where bash has no such variable it does not load, and then
 * nobody is told.
 */

extern int last_command_exit_signal; /* Bash's own; set whenever it has waited for a job. */

static int
take (void *words)
{
  int signal = last_command_exit_signal;
  (void) words;
  last_command_exit_signal = 0;
  return signal;
}

/* As builtins.h of bash has it, unchanged since version 2. */
struct builtin
{
  const char *name;
  int (*function) (void *);
  int flags;
  char *const *long_doc;
  const char *short_doc;
  char *handle;
};

enum { BUILTIN_ENABLED = 1 };

static char *const no_help[] = { 0 };

struct builtin __warren_w_struct = { "__warren_w", take, BUILTIN_ENABLED, no_help, "__warren_w", 0 };
