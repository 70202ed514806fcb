/* Package, header and library tell the same version, and a mistake is answered, not fatal. */
#include <keyhole/keyhole.h>
#include <stdio.h>
#include <string.h>

#define EXPECT(condition)                                     \
  do {                                                        \
    if (!(condition)) {                                       \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
      return 1;                                               \
    }                                                         \
  } while (0)

int main(void) {
  char header_version[32];
  snprintf(header_version, sizeof header_version, "%d.%d.%d", KEYHOLE_VERSION_MAJOR,
           KEYHOLE_VERSION_MINOR, KEYHOLE_VERSION_PATCH);
  EXPECT(strcmp(keyhole_version(), header_version) == 0);
  EXPECT(strcmp(keyhole_version(), PACKAGE_VERSION) == 0);
  EXPECT(keyhole_abi_version() == KEYHOLE_ABI_VERSION);

  keyhole_engine_config config;
  keyhole_engine_config_init(&config); /* the required fields are still 0 */
  keyhole_engine* engine = (keyhole_engine*)&config;
  EXPECT(keyhole_engine_create(&config, &engine) == KEYHOLE_INVALID_ARGUMENT);
  EXPECT(engine == NULL);
  EXPECT(strlen(keyhole_last_error()) > 0);
  printf("refused as it should: %s\n", keyhole_last_error());
  return 0;
}
